"""The page of `r1 view` in headless Chromium: curves, samples, what is appended, scripts, keyboard, narrow and dark."""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_pages import HOSTILE, LATER, PICTURE, write_episodes, write_log, write_run, write_samples, write_tokenizer
from cli_processes import write as write_process

from r1_cli.runs.processes import Process
from r1_cli.runs.view.app import build_app
from r1_cli.runs.view.guard import LOOPBACK

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")]
pytest.importorskip("playwright", reason="playwright is not installed")
QUICKSTART = Path(__file__).resolve().parents[3] / "examples/quickstart/config.yaml"
STEPS, GROUPS, EACH = 25, 500, 8  # 100,000 answers


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def serve() -> Iterator[Any]:
    import uvicorn

    servers = []

    def start(*runs: Path) -> str:
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # a page may ask before the server's thread has begun
        server = uvicorn.Server(uvicorn.Config(build_app(runs, None, LOOPBACK), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{listening.getsockname()[1]}/"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join()


def open_page(browser: Any, address: str, **how: Any) -> tuple[Any, list[str]]:
    """Return a page and what its console says wrong, refused scripts among it."""
    page, wrong = browser.new_context(**how).new_page(), []
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(address)
    page.wait_for_selector("nav")
    return page, wrong


def test_curves_of_two_runs_grow_while_they_are_shown(tmp_path: Path, browser: Any, serve: Any) -> None:
    one, two = write_run(tmp_path / "one", steps=3), write_run(tmp_path / "two", steps=3, offset=0.5)
    for log in tmp_path.glob("*/experiment_log.jsonl"):
        log.write_text(log.read_text().replace("}", ', "reward/failures": 0}'))
    page, wrong = open_page(browser, serve(one, two) + "#charts")
    chart = page.locator("figure", has_text="reward/overall")
    chart.wait_for()
    assert page.locator("dl.steady").inner_text().split() == ["reward/failures", "0", "0"]
    assert page.locator("figure", has_text="reward/failures").count() == 0
    assert chart.locator("path.curve").count() == 2
    assert re.search(r"last\s*one\s*0.6667\s*two\s*1.167", chart.locator(".readout").inner_text())
    assert chart.locator("text.end").all_text_contents() == ["one", "two"]
    assert "The reward, mean over prompts" in chart.locator(".help").inner_text()
    assert "live" in page.locator("header").inner_text()
    with (one / "experiment_log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/overall": 7.5}) + "\n")
    chart.get_by_text("7.5", exact=False).first.wait_for(timeout=10_000)
    chart.get_by_role("img").focus()
    page.keyboard.press("Home")
    assert "step 1" in chart.locator(".readout").inner_text()
    other = page.locator("figure", has_text="actor/grad_norm")
    assert "step 1" in other.locator(".readout").inner_text(), "all charts share the step"
    page.get_by_label("Step of all charts").press("End")
    assert "last" in other.locator(".readout").inner_text()
    chart.get_by_role("img").hover(position={"x": 60, "y": 60})
    assert "step 1" in other.locator(".readout").inner_text()
    page.get_by_label("Find metrics").fill("grad")
    page.get_by_label("log scale").check()
    page.locator("figure", has_text="actor/grad_norm").wait_for()
    assert page.locator("figure").count() == 1
    assert not wrong


def test_a_run_of_fine_tuning_shows_its_rows_coloured_by_their_loss(tmp_path: Path, browser: Any, serve: Any) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft/experiment_log.jsonl").write_text(json.dumps({"step": 1, "sft/nll": 0.5, "actor/lr": 1.0}) + "\n")
    write_samples(tmp_path / "sft", 1, phase="sft")
    page, wrong = open_page(browser, serve(tmp_path / "sft") + "#charts")
    page.get_by_role("region", name="Fine-tuning").locator("figure", has_text="sft/nll").wait_for()
    page.keyboard.press("s")
    page.get_by_text("12 answers").wait_for()
    assert page.get_by_role("button", name="failed reward").count() == 0
    group = page.get_by_role("region", name="Group")
    group.locator(".tokens span").first.wait_for()
    assert "surprise (−log p)" in group.locator("select").inner_text()
    assert "mean log-prob" in group.locator("article").first.inner_text()
    assert "mean ± spread" not in group.locator("dt").all_inner_texts()
    assert group.get_by_text("picture not in the record").count() == 1
    assert not wrong


def test_samples_are_filtered_and_opened_by_keyboard_and_hostile_texts_stay_texts(
    tmp_path: Path, browser: Any, serve: Any
) -> None:
    first = write_run(tmp_path / HOSTILE.replace("/", ""))
    write_tokenizer(first)
    address = serve(first, write_run(tmp_path / "other", steps=1))
    page, wrong = open_page(browser, address)
    page.keyboard.press("s")
    page.get_by_text("36 answers").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("2 plus 2")
    page.get_by_text("12 answers").wait_for()
    page.get_by_role("button", name="truncated").press("Enter")
    page.get_by_text("3 answers", exact=False).first.wait_for()
    page.get_by_role("listbox").focus()
    page.keyboard.press("ArrowDown")
    group = page.get_by_role("region", name="Group")
    group.get_by_role("heading", name="step 2, group 2").wait_for()
    group.locator("article").nth(3).wait_for()
    assert HOSTILE in group.locator(".prompt").inner_text()
    assert HOSTILE in group.locator("article .part .name").all_inner_texts()
    assert group.locator("article .nan").count() == 1  # the second answer's score is NaN
    page.wait_for_function("() => document.querySelector('.prompt img').naturalWidth === 64")
    assert group.locator(".tokens span").nth(3).inner_text() == HOSTILE
    assert (
        group.locator(".tokens span").first.evaluate("one => getComputedStyle(one).backgroundColor")
        != "rgba(0, 0, 0, 0)"
    )
    assert group.locator(".strip").get_by_role("button", name="step 1").count() == 2  # of this run and of the other
    page.keyboard.press("[")
    group.get_by_role("heading", name="step 1, group 2").wait_for()
    page.keyboard.press("k")
    group.get_by_role("heading", name="step 3, group 2").wait_for()
    group.get_by_role("button", name="compare").first.click()
    assert group.locator("ins").first.inner_text() != ""
    group.get_by_role("button", name="raw").click()
    page.keyboard.press("Escape")
    group.locator("ins").first.wait_for(state="detached")
    assert group.locator(".prompt .text").inner_text() == f"What is 2 plus 2? {HOSTILE}"
    page.keyboard.press("Escape")
    group.wait_for(state="detached")
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    assert page.title() == "r1 view"
    assert page.locator("main script, main img[onerror]").count() == 0
    assert not wrong


def test_an_episode_is_shown_as_a_conversation(tmp_path: Path, browser: Any, serve: Any) -> None:
    run = write_episodes(tmp_path / "one")
    write_tokenizer(run)
    page, wrong = open_page(browser, serve(run) + "#samples")
    article = page.locator("article").first
    article.wait_for()
    turns = article.locator(".turn")
    assert turns.count() == 4
    assert [turns.nth(at).locator(".tokens span").count() for at in range(4)] == [4, 0, 2, 0]
    assert turns.nth(0).locator(".tokens span").nth(3).inner_text() == HOSTILE
    assert "reward 0.5" in turns.nth(0).inner_text()
    tool = turns.nth(1)
    assert re.search(r'look \{"x0": 0\.5\}\s+0\.25 s', tool.inner_text())
    assert [turns.nth(at).locator(".role").inner_text() for at in (0, 1, 3)] == ["assistant reward 0.5", "tool", "user"]
    assert tool.locator(".bad").inner_text() == "exception: no such part"
    assert "Here it is:" in tool.inner_text()
    page.wait_for_function("() => document.querySelector('.turn img').naturalWidth === 64")
    assert LATER in tool.locator("img").get_attribute("src")
    prompt = page.locator(".prompt img")
    assert prompt.count() == 1  # the tool's picture is no picture of the prompt
    assert PICTURE in prompt.get_attribute("src")
    assert "nobody reads this" in turns.nth(3).inner_text()
    assert "stopped: done" in article.inner_text()
    assert not wrong


def test_a_fork_shows_its_own_prompt_beside_its_main_path(tmp_path: Path, browser: Any, serve: Any) -> None:
    run = write_episodes(tmp_path / "one")
    path = run / "samples/000000001-train.parquet"
    table = pq.read_table(path, partitioning=None)
    rows = table.to_pylist()
    rows[0] |= {"stop_reason": "forked", "prompt": "What is 0 plus 0? Nothing. And now?"}
    rows[1]["sample"] = 0  # the main path of that fork
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    page, wrong = open_page(browser, serve(run) + "#samples")
    page.locator(".row .question", has_text="0 plus 0").click()
    page.get_by_role("heading", name="step 1, group 0").wait_for()
    page.locator("article").nth(3).wait_for()
    assert page.locator(".prompt .parts").inner_text().strip() == f"What is 0 plus 0? {HOSTILE}"
    own = page.locator("article details")
    assert own.count() == page.locator("article", has_text="fork").locator("details").count() == 1
    own.locator("summary").click()
    assert own.locator(".parts").inner_text() == "What is 0 plus 0? Nothing. And now?"
    assert not wrong


def test_a_hundred_thousand_answers_are_a_few_elements(tmp_path: Path, browser: Any, serve: Any) -> None:
    for step in range(1, STEPS + 1):
        write_samples(tmp_path, step, GROUPS, EACH)
    page, wrong = open_page(browser, serve(tmp_path) + "#samples")
    begin = time.perf_counter()
    page.get_by_text("100,000 answers").wait_for(timeout=60_000)
    print(f"first list: {time.perf_counter() - begin:.2f} s")
    listing = page.get_by_role("listbox")
    listing.focus()
    page.keyboard.press("End")
    begin = time.perf_counter()
    page.locator("#row12499", has_text="plus").wait_for(timeout=60_000)
    print(f"its end: {time.perf_counter() - begin:.2f} s")
    assert page.locator(".row").count() < 100
    begin = time.perf_counter()
    page.get_by_label("Search prompt and answer").fill("says 3999.")
    page.get_by_text("25 answers").wait_for(timeout=60_000)
    print(f"search: {time.perf_counter() - begin:.2f} s")
    assert not wrong


DESK, PHONE = {"width": 1360, "height": 900}, {"width": 390, "height": 844}
# Eleven views: the runs that are shown, the page, the screen, its colours, and texts that stand there.
VIEWS: dict[str, tuple[tuple[str, ...], str, dict[str, int], str, tuple[str, ...]]] = {
    "overview": (("one",), "overview", DESK, "light", ("Step 3 of 9", "Reward", "Nothing of what is known")),
    "overview-phone": (("one",), "overview", PHONE, "dark", ("Step 3 of 9", "engine-0", "12 s lost")),
    "overview-runs": (("one", "died"), "overview", DESK, "light", ("What differs", "worker.rollout.n", "OSError")),
    "overview-runs-phone": (("one", "died"), "overview", PHONE, "light", ("What differs", "It stopped")),
    "died": (("died",), "overview", DESK, "dark", ("It stopped", "No space left", "No step was complete")),
    "waiting": (("none",), "overview", PHONE, "light", ("Waiting for the run to begin", "does not exist yet")),
    "charts": (("one", "two"), "charts", DESK, "light", ("Rewards and advantages", "reward/overall", "it should rise")),
    "charts-phone": (("one", "two"), "charts", PHONE, "dark", ("reward/overall", "smoothing")),
    "samples": (("one",), "samples", DESK, "light", ("36 answers", "score")),
    "samples-phone": (("one",), "samples", PHONE, "dark", ("36 answers",)),
    "samples-group": (("one", "two"), "samples", DESK, "dark", ("36 answers", "mean ± spread", "compare")),
}  # fmt: skip


def write_viewed(folder: Path) -> None:
    """Write the runs of VIEWS: two with answers, and one that ended before its first step."""
    config: dict[str, Any] = {"worker": {"rollout": {"n": 4}}, "trainer": {"max_steps": 9}}
    start = {"began": "2026-01-01T00:00:00+00:00", "ended": None, "end": "", "from_step": 0, "config": config}
    for name, more in {
        "one": {},
        "two": {"ended": "2026-01-01T00:09:00+00:00", "end": "complete"},
        "died": {
            "ended": "2026-01-01T00:09:00+00:00", "end": "OSError: [Errno 28] No space left on device: 'x'" * 4,
            "config": config | {"worker": {"rollout": {"n": 8}}},
        },
    }.items():  # fmt: skip
        if name != "died":
            write_run(folder / name)
            log = folder / name / "experiment_log.jsonl"
            rows = [json.loads(line) | {"response_length/mean": 12.5} for line in log.read_text().splitlines()]
            log.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / name).mkdir(exist_ok=True)
        restart = {"cause": "learner-1 died", "step": 2, "steps_again": 1, "seconds_lost": 12.0}
        (folder / name / "manifest.json").write_text(json.dumps({"starts": [start | more | {"restart": restart}]}))
    long = {"call.policy.forward_backward": 1234.5, "call.policy.sync_weights": 9.0, "call.policy.save": 1.0}
    write_process(folder / "one", Process("engine-0", "a-node-of-a-cluster", "x", 7, 1, 0.0, time.time(), seconds=long))


def test_views_are_whole_on_desk_and_phone_in_light_and_dark(tmp_path: Path, browser: Any, serve: Any) -> None:
    """With R1_VIEW_PICTURES=FOLDER it writes their pictures there, of the runs R1_VIEW_RUNS=A,B if they are given."""
    write_viewed(tmp_path)
    own, pictures = os.environ.get("R1_VIEW_RUNS", ""), os.environ.get("R1_VIEW_PICTURES")
    for name, (runs, page_name, size, colours, texts) in VIEWS.items():
        folders = [Path(run) for run in own.split(",")][: len(runs)] if own else [tmp_path / run for run in runs]
        page, wrong = open_page(browser, f"{serve(*folders)}#{page_name}", viewport=size, color_scheme=colours)
        for text in () if own else texts:
            page.get_by_text(text).locator("visible=true").first.wait_for()
        page.wait_for_function("() => !document.querySelector('main [aria-busy=true]')")
        page.wait_for_function(
            "() => [...document.images].every((i) => i.complete || i.getBoundingClientRect().top > innerHeight)"
        )
        wide, screen = page.evaluate(
            "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.documentElement)"
        )
        assert wide <= screen, name
        assert not wrong, name
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(247, 245, 240)" if colours == "light" else "rgb(19, 19, 17)")
        if pictures:
            write_picture(page.screenshot(), Path(pictures) / f"view-{name}.png")
        page.context.close()


def write_picture(shot: bytes, path: Path) -> None:
    """Write a screenshot with 48 colours: less than 60 KB."""
    from PIL import Image

    Image.open(io.BytesIO(shot)).convert("RGB").quantize(48, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < 60_000, path


def test_each_of_nine_runs_has_a_line_of_its_own_and_labels_lie_inside(
    tmp_path: Path, browser: Any, serve: Any
) -> None:
    runs = [write_run(tmp_path / f"run_{number}", steps=3, offset=-1.2345e-5) for number in range(9)]
    page, wrong = open_page(browser, serve(*runs) + "#charts")
    chart = page.locator("figure", has_text="reward/overall")
    chart.wait_for()
    look = "lines => lines.map(l => getComputedStyle(l).stroke + getComputedStyle(l).strokeDasharray)"
    assert len(set(chart.locator("path.curve").evaluate_all(look))) == 9
    left = "labels => labels.map(l => l.getBoundingClientRect().left - l.parentNode.getBoundingClientRect().left)"
    assert min(chart.locator("text").evaluate_all(left)) >= 0
    assert not wrong


def test_an_opened_group_is_in_sight_on_a_phone_and_controls_leave_room(
    tmp_path: Path, browser: Any, serve: Any
) -> None:
    page, wrong = open_page(browser, serve(write_run(tmp_path / "one")), viewport={"width": 360, "height": 740})
    page.keyboard.press("s")
    row = page.locator(".row", has_text="plus").first
    row.wait_for()
    assert page.locator(".head").bounding_box()["y"] < 740 / 4
    assert "36 answers" in page.locator(".head").inner_text()
    row.click()
    page.locator("article").first.wait_for()
    page.wait_for_function("() => document.querySelector('section h2').getBoundingClientRect().top < 370")
    assert not wrong


def test_nothing_is_said_of_steps_before_the_log_is_there(tmp_path: Path, browser: Any, serve: Any) -> None:
    page = browser.new_context().new_page()
    page.route("**/api/curves*", lambda route: page.wait_for_timeout(1500) or route.continue_())
    page.goto(serve(write_run(tmp_path / "one")) + "#charts")
    page.get_by_text("Loading the metrics").wait_for()
    assert page.get_by_text("Waiting for").count() == 0
    page.locator("figure").first.wait_for()


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path, browser: Any, serve: Any) -> None:
    page, wrong = open_page(browser, serve(tmp_path / "run"))
    page.get_by_text("Waiting for the run to begin").wait_for()
    page.get_by_text("this folder does not exist yet").wait_for()
    page.keyboard.press("c")
    page.get_by_text("Waiting for the first step").wait_for()
    page.keyboard.press("s")
    page.get_by_text("No sample of this phase is recorded").wait_for()
    write_log(tmp_path / "run", 2)
    page.keyboard.press("c")
    page.locator("figure").first.wait_for(timeout=10_000)
    assert not wrong


@pytest.mark.skipif(not QUICKSTART.is_file(), reason="the repository's examples are not here")
def test_a_real_run_is_looked_at_while_it_goes_on(tmp_path: Path, browser: Any, serve: Any) -> None:
    words = [
        "data.train_files=examples/quickstart/train.parquet[:64]", "data.val_files=null", "trainer.val_freq=-1",
        "data.rollout_batch_size=4", "worker.actor.global_batch_size=4", "worker.rollout.n=4", "trainer.max_steps=90",
        "worker.actor.micro_batch_size_per_device_for_update=16", f"trainer.save_checkpoint_path={tmp_path}",
        "worker.actor.micro_batch_size_per_device_for_experience=16", "trainer.save_freq=-1", "trainer.logger=[file]",
    ]  # fmt: skip
    page, wrong = open_page(browser, serve(tmp_path) + "#samples")
    command = [sys.executable, "-m", "r1_cli.main", "train", str(QUICKSTART), *words]
    run = subprocess.Popen(command, cwd=QUICKSTART.parents[2], stdout=subprocess.DEVNULL)
    counts: list[int] = []
    try:
        while run.poll() is None:
            found = re.search(r"([\d,]+) answers", page.inner_text("body"))
            counts.append(int(found[1].replace(",", "")) if found else 0)
            page.wait_for_timeout(250)
    finally:
        run.kill()
    assert run.returncode == 0
    page.get_by_text("1,440 answers").wait_for(timeout=10_000)
    assert counts == sorted(counts)
    assert len({count for count in counts if 0 < count < 1440}) > 1  # seen to grow while it went on
    page.keyboard.press("c")
    page.locator("figure", has_text="actor/grad_norm").locator("path.curve").first.wait_for()
    assert not wrong
