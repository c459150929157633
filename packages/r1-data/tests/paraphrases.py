"""Change texts and pictures as copies are changed that slip into training rows."""

import io
import random
import re

import numpy as np
from PIL import Image, ImageDraw

NAMES = ["Ana", "Bruno", "Chen", "Dalia", "Emeka", "Farid", "Greta", "Hiro", "Ines", "Jamal", "Kofi", "Lena", "Mira"]
ENDS = re.compile(r"(?<=[.!?])\s+")
SYNONYMS = {  # of frequent words in word problems
    "how many": "what number of", "buys": "purchases", "bought": "purchased", "has": "owns", "gets": "receives",
    "gave": "handed", "each": "every", "total": "sum", "left": "remaining", "makes": "produces", "sells": "trades",
    "costs": "is priced at", "money": "cash", "day": "date", "week": "seven days", "wants": "wishes",
    "then": "afterwards", "twice": "two times", "half": "one part in two", "spends": "pays", "needs": "requires",
}  # fmt: skip


def copy(text: str, rng: random.Random) -> str:
    return text


def reorder(text: str, rng: random.Random) -> str:
    """Shuffle the sentences."""
    parts = ENDS.split(text.strip())
    order = parts[:]
    while len(parts) > 1 and order == parts:
        rng.shuffle(order)
    return " ".join(order)


def repunctuate(text: str, rng: random.Random) -> str:
    """Leave out commas, quotes and hyphens, and end sentences otherwise."""
    return re.sub(r"\s+", "  ", re.sub(r"[.?](?=\s|$)", " !", re.sub(r"[,;:'\"’“”]", " ", text)))


def recase(text: str, rng: random.Random) -> str:
    return text.upper() if rng.random() < 0.5 else text.lower()


def respace(text: str, rng: random.Random) -> str:
    r"""Write numbers and formulas with other LaTeX: `$x+1$` as `\(x \,+\, 1\)`."""
    text = re.sub(r"\$(\d[\d,.]*\d|\d)", r"\\$\1\\,", text)
    text = re.sub(r"(\d)\s*([+*/=-])\s*(\d)", r"\1\\;\2\\;\3", text)
    return text.replace(r"\frac", r"\dfrac").replace("(", r"\left(").replace(")", r"\right)")


def rename(text: str, rng: random.Random) -> str:
    """Give every person and place another name; a capital in the middle of a sentence tells a name."""
    names = set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+\b", text)) | set(re.findall(r"\b[A-Z][a-z]+(?='s|’s)", text))
    first = {name for name in re.findall(r"(?:^|[.?!]\s+)([A-Z][a-z]+)", text) if name in names or text.count(name) > 1}
    new = dict(zip(sorted(names | first), rng.sample(NAMES, len(NAMES)) * 5, strict=False))
    return re.sub(r"\b[A-Z][a-z]+\b", lambda found: new.get(found[0], found[0]), text)


def renumber(text: str, rng: random.Random) -> str:
    return re.sub(r"\d+", lambda found: str(int(found[0]) + rng.randint(1, 40)), text)


def swap_words(text: str, rng: random.Random) -> str:
    """Replace frequent words by others of the same meaning."""
    for old, new in SYNONYMS.items():
        text = re.sub(rf"\b{old}\b", new, text)
    return text


FOUND = {"text": (copy, reorder, repunctuate, recase, respace, swap_words), "numbers": (rename, renumber)}


def resize(image: Image.Image, rng: random.Random) -> Image.Image:
    factor = rng.choice([0.5, 0.7, 1.5, 2.0])
    return image.resize((max(16, round(image.width * factor)), max(16, round(image.height * factor))))


def encode(image: Image.Image, rng: random.Random) -> Image.Image:
    """Write the picture as JPEG or WebP, and read it again."""
    file = io.BytesIO()
    image.save(file, rng.choice(["JPEG", "WEBP"]), quality=rng.choice([50, 75, 90]))
    return Image.open(file).convert("RGB")


def resize_and_encode(image: Image.Image, rng: random.Random) -> Image.Image:
    return encode(resize(image, rng), rng)


CHANGES = (resize, encode, resize_and_encode)


def draw_picture(kind: str, seed: int) -> Image.Image:
    """Draw a figure of geometry, a bar chart, or a scene of soft spots like a photograph."""
    rng = random.Random(seed)
    width, height = rng.choice([(224, 224), (320, 240), (200, 300)])
    if kind == "scene":
        coarse = np.random.default_rng(seed).integers(0, 256, (rng.randint(5, 9), rng.randint(5, 9), 3), dtype=np.uint8)
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    if kind == "chart":
        draw.line([(20, 10), (20, height - 20), (width - 10, height - 20)], fill="black", width=2)
        bars = rng.randint(4, 8)
        for bar in range(bars):
            left = 25 + bar * (width - 40) // bars
            top = rng.randint(15, height - 40)
            color = tuple(rng.randint(0, 200) for _ in range(3))
            draw.rectangle([left, top, left + (width - 40) // bars - 6, height - 21], fill=color)
        return image
    points = [(rng.randint(10, width - 10), rng.randint(10, height - 10)) for _ in range(rng.randint(3, 6))]
    draw.polygon(points, outline="black", width=3)
    for x, y in points:
        draw.text((x + 4, y - 10), rng.choice("ABCDEFGHXYZ"), fill="black")
    if rng.random() < 0.5:
        x, y, radius = rng.randint(50, width - 50), rng.randint(50, height - 50), rng.randint(20, 60)
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], outline="black", width=3)
    return image
