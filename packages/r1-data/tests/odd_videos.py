"""Odd and broken videos: films, and frames one by one."""

from odd_cases import Case, Named, Read, filmed
from odd_media import PNG, drawing, film, moving, noise, sound_only, turned_film


def videos() -> dict[str, Case]:
    return {
        "film": Case(filmed(film()), Read(videos=1, shape="wide")),
        "film turned by its matrix": Case(filmed(turned_film()), Read(videos=1, shape="tall")),
        "film of odd sizes": Case(filmed(film(62, 46)), Read(videos=1)),
        "film in Matroska": Case(filmed(film(kind="matroska")), Read(videos=1)),
        "film as an animated GIF": Case(filmed(moving("GIF")), Read(videos=1)),
        "film cut off": Case(filmed(film()[:600]), Named("cannot be read|video")),
        "film of noise behind its header": Case(filmed(film()[:200] + b"\xaa" * 3000), Named("cannot be read|video")),
        "film of sound": Case(filmed(sound_only()), Named("video|frames|pictures")),
        "film of no bytes": Case(filmed(b""), Named("0 bytes|empty")),
        "film that is a picture": Case(filmed(PNG), Named("video")),
        "film that is a playlist": Case(filmed(b"#EXTM3U\nfile:///etc/passwd\n"), Named("video")),
        "film that is null": Case(filmed(None), Named("video")),
        "frames": Case(filmed([PNG, PNG]), Read(videos=1)),
        "frames of two sizes": Case(filmed([PNG, noise()]), Named("one size|size")),
        "frames of none": Case(filmed([]), Named("no frames|video")),
        "frames with a broken one": Case(filmed([PNG, b"hello"]), Named("cannot be read")),
        "frames at no rate": Case(filmed({"frames": [PNG, PNG], "fps": 0}), Named("fps")),
        "frames at NaN": Case(filmed({"frames": [PNG, PNG], "fps": float("nan")}), Named("fps")),
        "frames at a word": Case(filmed({"frames": [PNG, PNG], "fps": "fast"}), Named("fps")),
        "frames that are transparent": Case(filmed([drawing("RGBA")] * 2), Read(videos=1)),
        "film missing": Case(filmed("gone.mp4"), Named("no such file")),
    }
