"""What comes from outside is read or refused: a second of damaged input for each reader, and what it once broke."""

import io
import json
from pathlib import Path

import fuzz
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from r1_cli.build.algorithm import build_start
from r1_cli.checkpoint.damage import find_damage
from r1_cli.checkpoint.folders import CheckpointError
from r1_cli.config import ConfigError, RunConfig, load_config
from r1_cli.jobs.resume import load_start
from r1_data.references import resolve_video
from r1_data.sources import read_rows
from r1_data.tables.spec import name_source
from r1_data.types import DataError, MediaError
from r1_data.videos import FrameRules, probe_video


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_damaged_input_is_refused_by_the_error_that_is_meant_for_users(target: str) -> None:
    result = fuzz.fuzz(target, seconds=1.0)
    assert result.refused
    assert result.refused < max(result.inputs, 50), "of fifty, some are read"
    assert not result.crashes


def test_the_fuzzer_finds_a_reader_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> object:
        return (lambda rng: json.loads(fuzz.damage_bytes(b"[1, 2]", rng))[0]), (json.JSONDecodeError,)

    monkeypatch.setitem(fuzz.TARGETS, "broken", broken)
    assert any(key.startswith("IndexError") for key in fuzz.fuzz("broken", seconds=0.5).crashes)


@pytest.mark.parametrize("key", ["step", "cursor", "kl_coef", "model_only"])
def test_a_checkpoint_without_its_position_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "trainer.json").write_text(json.dumps({k: v for k, v in fuzz.STATE.items() if k != key}))
    with pytest.raises(CheckpointError, match=rf"trainer.json holds no position of a run \(KeyError: '{key}'\)"):
        load_start(None, None, [], tmp_path, build_start(RunConfig()))  # type: ignore[arg-type]


@pytest.mark.parametrize("files", [[["a"], "b"], [[1]], 7])
def test_a_checkpoint_whose_list_of_files_is_damaged_is_found(tmp_path: Path, files: object) -> None:
    (tmp_path / "trainer.json").write_text(json.dumps({"files": files}))
    assert "no JSON of its kind" in str(find_damage(tmp_path))
    (tmp_path / "trainer.json").write_text(json.dumps({"files": ["x" * 5000]}))
    assert "is missing" in str(find_damage(tmp_path))


@pytest.mark.parametrize("key", ["worker.actor.model.model_path", "data.format_prompt", "worker.actor.model.lora.path"])
def test_a_name_that_the_system_refuses_is_the_name_of_no_file(key: str) -> None:
    name = "./" + "x" * 300
    with pytest.raises(ConfigError, match=rf"{key}.*no such|{key}.*adapter_config"):
        load_config(["examples/config.yaml", f"{key}={name}"])


def test_brackets_without_a_slice_are_refused_where_the_rows_are_read() -> None:
    assert name_source("owner/name@train]") == "name"
    with pytest.raises(DataError, match="a slice is written"):
        read_rows("owner/name@train]")


def test_a_parquet_file_whose_column_has_no_readable_name_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"problem": ["a"]}), written := io.BytesIO())
    (tmp_path / "a.parquet").write_bytes(written.getvalue().replace(b"problem", b"pro\x89lem"))
    with pytest.raises(DataError, match=r"a\.parquet: not a parquet file"):
        read_rows(str(tmp_path / "a.parquet"))


def test_a_parquet_file_with_fewer_rows_than_its_header_says_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"problem": ["a", "b", "c"]}), written := io.BytesIO())
    whole, told = written.getvalue(), list[str]()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    for place in range(footer, len(whole) - 8):
        if whole[place] == 6:  # perhaps the 3 rows, in the code of Thrift
            (tmp_path / "a.parquet").write_bytes(whole[:place] + b"\x08" + whole[place + 1 :])
            try:
                rows = read_rows(str(tmp_path / "a.parquet"))
                told += [str(rows[index]) for index in range(len(rows))]
            except DataError as error:
                told.append(str(error))
    assert any("its row group 1 has 3 rows, and the file's header says 4" in one for one in told)


def test_a_video_of_an_unknown_codec_is_refused() -> None:
    film = fuzz._film("avi").replace(b"FMP4", b"zzzz")
    with pytest.raises(MediaError, match="codec is not known"):
        probe_video(resolve_video(film, None), FrameRules())


def test_a_text_that_is_not_utf_8_is_an_error_of_its_row_alone(tmp_path: Path) -> None:
    raw = pa.StringArray.from_buffers(
        3, pa.py_buffer(b"\0\0\0\0\5\0\0\0\x0c\0\0\0\x10\0\0\0"), pa.py_buffer(b"firstpro\x89lemlast")
    )
    pq.write_table(pa.table({"problem": raw}), tmp_path / "a.parquet")
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert [rows[0][1], rows[2][1]] == [{"problem": "first"}, {"problem": "last"}]
    with pytest.raises(DataError, match=r"a\.parquet:2: a text of the row is not UTF-8"):
        rows[1]
