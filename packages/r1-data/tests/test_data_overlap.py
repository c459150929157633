"""Copies, paraphrases and re-encoded pictures are found, and few other rows."""

import random

import paraphrases
import pytest
from PIL import Image

from r1_data.check import SourceRows
from r1_data.formats import Columns
from r1_data.messages import to_example
from r1_data.overlap import Fingerprinter, find_overlaps, fingerprint_rows
from r1_data.overlap.picture_hashes import PictureIndex, print_image
from r1_data.overlap.shares import FEWEST_COMMON, PartsIndex, print_text
from r1_data.overlap.words import hash_whole

FOUND, FALSE = 0.95, 0.01  # least and greatest share of rows

# Sentences of parts, each of which may stand with any other.
PEOPLE = ["Alice", "Boris", "Clara", "David", "Elena", "Frank", "Gina", "Henry"]
TIMES = [
    "every week",
    "during the summer",
    "before school",
    "after a long walk",
    "on rainy days",
    "at night",
    "last year",
]
ACTS = [
    "runs a bakery", "paints old chairs", "feeds the horses", "sorts letters", "plants tulips", "repairs bicycles",
    "reads to children", "bottles honey", "drives a tram", "teaches chess", "knits warm socks", "carries bricks",
]  # fmt: skip
SPOTS = ["near the harbour", "for a neighbour", "behind the museum", "in a village", "with two friends", "at the mill"]
FACTS = [
    "earns {n} dollars", "needs {n} boxes", "throws {n} of them away", "gives {n} to a cousin", "meets {n} visitors",
    "walks {n} miles", "waits {n} minutes", "finds {n} coins", "loses {n} buttons", "counts {n} birds",
]  # fmt: skip
LINKS = [
    "but",
    "and then",
    "because somebody",
    "while a dog",
    "although the owner",
    "so that a visitor",
    "until a child",
]
ASKED = ["How much is left", "How many are there in all", "What is the largest number", "Which share was lost"]
ENDINGS = ["when the day is over", "if nothing else happens", "once the rain stops", "according to the list"]


def problem(rng):
    """Return a word problem of four sentences."""
    name = rng.choice(PEOPLE)

    def fact():
        return rng.choice(FACTS).format(n=rng.randint(2, 99))

    def sentence(who):
        act, time, spot = rng.choice(ACTS), rng.choice(TIMES), rng.choice(SPOTS)
        return f"{who} {act} {spot} {time} and {fact()}, {rng.choice(LINKS)} {fact()}."

    told = [sentence(who) for who in (name, "Later a sister", f"For luck {name}")]
    return " ".join([*told, f"{rng.choice(ASKED)} for {name} {rng.choice(ENDINGS)}?"])


def problems(count, seed):
    rng = random.Random(seed)
    return [problem(rng) for _ in range(count)]


class Rows(list):
    def __getitem__(self, index):
        return f"rows:{index + 1}", super().__getitem__(index)


def overlaps(training, held_out, index_training=False, **options):
    def prints(rows):
        rows = [row if isinstance(row, dict) else {"problem": row} for row in rows]
        source = SourceRows("rows", Rows([{"answer": "1", **row} for row in rows]), read)
        return fingerprint_rows([source], Fingerprinter(**options))

    return find_overlaps(prints(training), prints(held_out), index_training=index_training)


def read(row_id, row):
    return to_example(row_id, row, Columns("problem", "answer"))


def places(found):
    return [(one.kind, one.training.index, one.held_out.index) for one in found]


@pytest.mark.parametrize("kind", paraphrases.FOUND)
@pytest.mark.parametrize("index_training", [False, True])
def test_planted_paraphrases_are_found(kind, index_training):
    held_out, others = problems(60, 1), problems(60, 2)
    for change in paraphrases.FOUND[kind]:
        rng = random.Random(3)
        planted = [change(text, rng) for text in held_out]
        found = overlaps(others + planted, held_out, index_training)
        right = [one for one in found if one.training.index == one.held_out.index + len(others)]
        assert len(right) >= FOUND * len(held_out), change.__name__


def test_other_problems_are_rarely_found():
    found = overlaps(problems(400, 4), problems(300, 5))
    assert len(found) <= FALSE * 300


def test_the_kind_says_whether_only_numbers_and_names_differ():
    text = "Ann buys 3 red kites at the market for Bob. Later Bob and Ann fly 2 of them over the hill that Bob likes."
    rng = random.Random(7)
    changed = [paraphrases.reorder(text, rng), paraphrases.renumber(text, rng), paraphrases.rename(text, rng)]
    assert [overlaps([one], [text])[0].kind for one in changed] == ["text", "numbers", "numbers"]
    assert [overlaps([one, text], [text])[0].kind for one in changed[1:]] == ["text", "text"]  # the surest pair
    assert overlaps([*changed, text], [text])[0].count == 4


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"What is $\frac12 + x$?", r"what is \( \dfrac{1}{2} \, + \, x \)", True),
        ("Compute 1,000 + 5.", r"Compute $1{,}000+5$", True),
        ("What is 3 + 4?", "What is 3 - 4?", False),
        ("What is 3 + 4?", "What is 3 + 5?", False),
        ("求方程的解", "求方程的解。", True),
        ("求方程的解", "求方程的根", False),
    ],
)
def test_short_texts_are_compared_as_wholes(one, other, same):
    assert (hash_whole(one) == hash_whole(other)) is same
    assert bool(overlaps([one], [other])) is same


def test_a_question_inside_a_longer_row_is_found():
    one, *others = problems(9, 8)
    assert places(overlaps([" ".join([*others[:4], one, *others[4:]])], [one])) == [("text", 0, 0)]


def test_an_instruction_that_all_rows_share_does_not_count():
    rule = "Think step by step about everything that was said, then write the final answer as one number in a box. "
    training, held_out = problems(20, 9), problems(20, 10)
    before = places(overlaps(training, held_out))
    assert places(overlaps([rule + one for one in training], [rule + one for one in held_out])) == before
    few = FEWEST_COMMON  # rows that share it are taken for the same question
    assert len(overlaps([rule + "Go."], [rule + f"Number {n}" for n in range(few)])) == few


def test_texts_of_numbers_or_capitals_are_not_alike():
    rng = random.Random(11)
    matrices = ["Find the trace of " + " ".join(str(rng.randint(0, 9)) for _ in range(40)) for _ in range(2)]
    shouted = [one.upper() for one in problems(2, 12)]
    assert not overlaps(matrices[:1], matrices[1:])
    assert not overlaps(shouted[:1], shouted[1:])


def test_equal_rows_are_all_counted():
    text = problems(1, 13)[0]
    (found,) = overlaps([text] * 30, [text], index_training=True)
    assert found.count == 30


@pytest.mark.parametrize("kind", ["figure", "chart", "scene"])
def test_changed_pictures_are_found_and_others_are_not(kind):
    images = [paraphrases.draw_picture(kind, seed) for seed in range(40)]
    index = PictureIndex()
    for number, image in enumerate(images):
        index.add(number, print_image(image))
    index.close()
    rng = random.Random(14)
    for change in paraphrases.CHANGES:
        found = [{row for row, _, _ in index.find(print_image(change(image, rng)))} for image in images]
        assert sum(number in rows for number, rows in enumerate(found)) >= FOUND * len(images), change.__name__
        assert sum(bool(rows - {number}) for number, rows in enumerate(found)) <= 1
    others = [print_image(paraphrases.draw_picture(kind, 1000 + seed)) for seed in range(100)]
    assert sum(any(True for _ in index.find(one)) for one in others) <= FALSE * len(others)


def row(text, image):
    return {"problem": f"<image>{text}", "images": [image]}


def test_rows_with_pictures_are_compared_by_them_unless_their_text_is_long():
    rng = random.Random(15)
    first, second = (paraphrases.draw_picture("figure", seed) for seed in (1, 2))
    long = problems(1, 16)[0]
    assert not overlaps([row("Find x.", first)], [row("Find x.", second)])
    assert places(overlaps([row("Find x.", first)], [row("What is y?", first)])) == [("pixels", 0, 0)]
    smaller = paraphrases.resize_and_encode(first, rng)
    assert places(overlaps([row("Find x.", smaller)], [row("Find x.", first)])) == [("picture", 0, 0)]
    assert places(overlaps([row(long, first)], [row(long, second)])) == [("text", 0, 0)]


def test_a_picture_of_one_colour_matches_none():
    blank = Image.new("RGB", (64, 64), "white")
    assert print_image(blank) is None
    assert not overlaps([row("Find x.", blank)], [row("Find y.", blank)])


def test_without_decoding_a_short_row_equals_another_of_the_same_text_and_file(picture):
    one, other = picture(40, 40), picture(48, 40)
    rows = [row("Find x.", one)]
    assert places(overlaps(rows, rows, decode=False)) == [("text", 0, 0)]
    assert not overlaps(rows, [row("Find y.", one), row("Find x.", other)], decode=False)
    broken = [row("Find x.", b"no picture")]
    assert places(overlaps(broken, broken, decode=False)) == [("text", 0, 0)]


def test_a_row_that_cannot_be_read_is_named_and_left_out(picture):
    rows = Rows([{"problem": "Find x.", "answer": None}, {**row("Find x.", picture(40, 40)[:100]), "answer": "1"}])
    prints = list(fingerprint_rows([SourceRows("rows", rows, read)], Fingerprinter()))
    assert [one.id for one in prints] == ["rows:1", "rows:2"]
    assert "rows:1" in prints[0].problem
    assert "rows:2" in prints[1].problem
    assert not find_overlaps(prints, prints, index_training=False)


def test_an_index_holds_16_bytes_a_part():
    index = PartsIndex()
    for text in problems(50, 17):
        index.add(print_text(text).runs)
    index.close()
    assert index.hashes.nbytes + index.weights.nbytes + index.rows.nbytes == 16 * len(index.hashes)


def test_texts_with_few_pairs_of_words_in_common_are_others():
    begin, one, other = (
        "the old farmer carries a heavy basket from",
        "field into town every morning",
        "boat as rain ruins hay",
    )
    assert overlaps([f"{begin} {one}"], [f"{begin} {other}"]) == []  # 7 of 12 pairs
    found = overlaps([f"{begin} his {one}"], [f"{begin} his {other}"])
    assert [pair.share for pair in found] == [pytest.approx(8 / 13)]
