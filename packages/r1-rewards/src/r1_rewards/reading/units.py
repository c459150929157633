"""The units that `numeric` converts: names, kinds and exact factors."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Unit:
    kind: str
    factor: Fraction


_NAMES = {
    "length": {
        "m meter meters metre metres": "1", "km kilometer kilometers kilometre kilometres": "1000",
        "cm centimeter centimeters centimetre centimetres": "0.01",
        "mm millimeter millimeters millimetre millimetres": "0.001", "um μm micrometer micrometers": "1e-6",
        "nm nanometer nanometers": "1e-9", "in inch inches": "0.0254", "ft foot feet": "0.3048",
        "yd yard yards": "0.9144", "mi mile miles": "1609.344",
    },
    "mass": {
        "kg kilogram kilograms": "1", "g gram grams": "0.001", "mg milligram milligrams": "1e-6", "t ton tonne tonnes":
        "1000", "lb lbs pound pounds": "0.45359237", "oz ounce ounces": "0.028349523125",
    },
    "time": {
        "s sec secs second seconds": "1", "ms millisecond milliseconds": "0.001", "min mins minute minutes": "60",
        "h hr hrs hour hours": "3600", "d day days": "86400", "week weeks": "604800",
    },
    "area": {"m2": "1", "km2": "1e6", "cm2": "1e-4", "mm2": "1e-6", "ha hectare hectares": "1e4"},
    "volume": {
        "l L liter liters litre litres": "0.001", "ml mL milliliter milliliters": "1e-6", "m3": "1", "cm3": "1e-6",
        "mm3": "1e-9",
    },
    "speed": {
        "m/s": "1", "km/h kmh kmph kph": "1000/3600", "mph": "1609.344/3600", "cm/s": "0.01", "km/s": "1000",
    },
    "angle": {"degree degrees deg circ": "1"},
    "energy": {"J joule joules": "1", "kJ": "1000", "MJ": "1e6", "kWh": "3600000", "cal": "4.184", "kcal": "4184"},
    "power": {"W watt watts": "1", "kW": "1000", "MW": "1e6"},
    "force": {"N newton newtons": "1", "kN": "1000"},
    "pressure": {"Pa pascal pascals": "1", "kPa": "1000", "MPa": "1e6", "bar": "100000", "atm": "101325"},
    "money": {"dollar dollars USD": "1", "cent cents": "0.01"},
    "frequency": {"Hz hertz": "1", "kHz": "1000", "MHz": "1e6", "GHz": "1e9"},
}  # fmt: skip


def _factor(text: str) -> Fraction:
    numerator, _, denominator = text.partition("/")
    return Fraction(numerator) / Fraction(denominator or 1)


UNITS = {
    name: Unit(kind, _factor(factor))
    for kind, units in _NAMES.items()
    for names, factor in units.items()
    for name in names.split()
}
