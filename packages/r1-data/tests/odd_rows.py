"""Odd and broken rows, files, pictures, videos and URLs, each with what should become of it.

Written before the code that reads them was looked at. Each case stands between two sound rows where it is a row.
"""

import odd_mixtures
from odd_cases import Case
from odd_files import lines_and_files, tables
from odd_pictures import pictures
from odd_prompts import prompts_and_truths
from odd_videos import videos

CASES: dict[str, Case] = lines_and_files() | tables() | prompts_and_truths() | pictures() | videos()
CASES |= odd_mixtures.names() | odd_mixtures.contents() | odd_mixtures.cells() | odd_mixtures.media()
