"""A covered picture, and a look under the cover: the policy writes `?` and gets the picture."""

import base64
import io
from typing import Any

from PIL import Image

CALL = "?"
COVER = (128, 128, 128)


class Look:
    """The prompt shows a grey cover instead of the picture. Any turn that is not `?` is the answer."""

    def __init__(self, blind: bool = False) -> None:
        """blind: show the cover again instead of the picture, to see what looking is worth."""
        self.blind = blind

    def reset(self, row: dict[str, Any]) -> None:
        with Image.open(io.BytesIO(base64.b64decode(row["picture"]))) as picture:
            self.picture = picture.convert("RGB")

    def step(self, text: str) -> Image.Image | None:
        """Return the picture, or None: the episode is over, and the reward function judges the last turn."""
        if text.strip() != CALL:
            return None
        return Image.new("RGB", (56, 56), COVER) if self.blind else self.picture
