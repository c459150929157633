"""What a user's function may ask for by its parameters' names, functions of texts, TRL's and veRL's, and async ones."""

import dataclasses
import io
import sys

import pytest

from r1_rewards import RewardInput, RewardSpecError, load
from r1_rewards.spec import parse_spec
from r1_rewards.workers.arguments import check_columns
from r1_rewards.workers.functions import load_function, score_samples

INPUTS = [
    RewardInput(
        "3", "3", response_length=4, prompt="<user>How many?", step=7, metadata={"level": 2, "source": "a"},
        messages=[{"role": "user", "content": "How many?"}],
    ),
    RewardInput(
        "55", "5", response_length=9, prompt="<user>And now?", step=7, metadata={"level": 3, "source": "b"},
        messages=[{"role": "user", "content": "And now?"}],
    ),
]  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write_file(source):
        (tmp_path / "reward.py").write_text(source)
        return f"{tmp_path / 'reward.py'}:f"

    return write_file


def values(spec, kwargs=None, inputs=INPUTS):
    with load(spec, kwargs) as verifier:
        scores = verifier(inputs)
    assert [score.error for score in scores] == [None] * len(inputs)
    return [score.value for score in scores]


@pytest.fixture
def here(monkeypatch):
    """The same in this process, which is faster than starting another."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(spec, kwargs=None):
        function = load_function(parse_spec(spec), kwargs or {})
        samples = [dataclasses.asdict(item) for item in INPUTS]
        calls = [[sample] for sample in samples] if not function.batch else [samples]
        outcomes = [outcome for one in calls for outcome in score_samples(function, one)]
        return [outcome.value for outcome in outcomes]

    return call


def test_a_batch_function_gets_what_its_parameters_name_as_lists(write):
    spec = write(
        "def f(items, prompts, response_lengths, level, metadata, messages, step=0, weight=1.0, source=None):\n"
        "    assert prompts == ['<user>How many?', '<user>And now?'] and response_lengths == [4, 9] and step == 7\n"
        "    assert level == [2, 3] and metadata[1] == {'level': 3, 'source': 'b'} and source is None\n"
        "    assert [m[0]['content'] for m in messages] == ['How many?', 'And now?']\n"
        "    return [weight * len(i['response']) for i in items]\n"
    )
    assert values(spec, {"weight": 0.5}) == [0.5, 1.0]


def test_a_sequential_function_gets_single_values(write):
    spec = write(
        "REWARD_TYPE = 'sequential'\n"
        "def f(item, *, prompt, response_length, level, step):\n"
        "    assert prompt.startswith('<user>') and item['level'] == level\n"
        "    return {'overall': response_length, 'level': level, 'step': step}\n"
    )
    with load(spec) as verifier:
        assert [dict(score.parts) for score in verifier(INPUTS)] == [
            {"overall": 4.0, "level": 2.0, "step": 7.0},
            {"overall": 9.0, "level": 3.0, "step": 7.0},
        ]


def test_a_function_of_columns_may_ask_for_more(write):
    spec = write("def f(prompts, responses, answers, step, level):\n    return [step + x for x in level]\n")
    assert values(spec) == [9.0, 10.0]


def test_keywords_of_the_configuration_win_over_the_row(write):
    spec = write("def f(items, level, step):\n    return [level + step for i in items]\n")
    assert values(spec, {"level": 10, "step": 1}) == [11.0, 11.0]


@pytest.mark.parametrize("kind", ["image", "bytes", "path"])
def test_pictures_arrive_as_pil_images_where_they_are_asked_for(write, tmp_path, kind):
    image = pytest.importorskip("PIL.Image", reason="needs pillow").new("RGB", (3, 2), (250, 5, 5))
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    (tmp_path / "red.png").write_bytes(buffer.getvalue())
    picture = {"image": image, "bytes": buffer.getvalue(), "path": tmp_path / "red.png"}[kind]
    spec = write(
        "def f(items, images):\n"
        "    return [sum(p.size[0] * 10 + p.getpixel((0, 0))[0] for p in group) for group in images]\n"
    )
    assert values(spec, inputs=[RewardInput("", "", images=[picture, picture]), RewardInput("", "")]) == [560.0, 0.0]


def test_pictures_stay_at_home_where_nobody_asks(write):
    spec = write("def f(items):\n    return [1.0 for i in items]\n")
    assert values(spec, inputs=[RewardInput("", "", images=[object()])]) == [1.0]
    with (
        load(write("def f(items, images):\n    return [1.0]\n")) as verifier,
        pytest.raises(TypeError, match="a picture is object"),
    ):
        verifier([RewardInput("", "", images=[object()])])


def test_a_column_that_the_row_lacks_is_named_with_the_nearest(write):
    spec = write("def f(items, levl):\n    return [1.0 for i in items]\n")
    with load(spec) as verifier:
        assert verifier.reward.wants == ("levl",)
        [score] = verifier(INPUTS[:1])
        with pytest.raises(RewardSpecError, match=r"a parameter 'levl'.* did you mean 'level'"):
            check_columns(verifier.reward.wants, ["level", "source"])
    assert "asks for a column that the data row lacks; did you mean 'level'" in score.error.message
    check_columns(["step", "prompts", "solution", "level"], ["level"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(completions, completion_ids, **kwargs): ...\n", "'completion_ids', which .* response_lengths"),
        ("def f(completions, trainer_state): ...\n", "'trainer_state', which .* ask for step"),
        ("COMPLETIONS = 'chat'\ndef f(completions): ...\n", "COMPLETIONS is 'chat'"),
        ("def f(completions, /): ...\n", "missing a required .*'completions'"),
    ],
)
def test_what_nothing_can_fill_is_refused_when_it_is_loaded(write, source, message):
    with pytest.raises(RewardSpecError, match=message):
        load(write(source))


def test_a_function_for_openrlhf_gets_queries_and_labels(write):
    spec = write(
        "def f(queries, prompts, labels):\n"
        "    return [float(q == p + label) for q, p, label in zip(queries, prompts, labels)]\n"
    )
    assert values(spec) == [1.0, 0.0]


def test_a_trl_function_of_strings_gets_columns_and_truths(write):
    spec = write(
        "def f(completions, ground_truth, level, prompts=None, **kwargs):\n"
        "    assert prompts == ['<user>How many?', '<user>And now?'] and kwargs['source'] == ['a', 'b']\n"
        "    return [float(c == t) + l for c, t, l in zip(completions, ground_truth, level)]\n"
    )
    assert values(spec) == [3.0, 3.0]


@pytest.mark.parametrize("name", ["solution", "answer", "labels"])
def test_a_trl_function_gets_the_truth_under_the_names_that_data_sets_give_it(write, name):
    spec = write(f"def f(completions, {name}):\n    return [float(c == t) for c, t in zip(completions, {name})]\n")
    assert values(spec) == [1.0, 0.0]
    own = [RewardInput("x", "1", metadata={name: "x"})]
    assert values(spec, inputs=own) == [1.0]  # a column of that name comes first


def test_a_trl_function_that_reads_content_gets_messages(write):
    spec = write(
        "def f(prompts, completions, **kwargs):\n"
        "    assert prompts[0] == [{'role': 'user', 'content': 'How many?'}]\n"
        "    contents = [completion[0]['content'] for completion in completions]\n"
        "    return [float(len(c)) for c in contents]\n"
    )
    assert values(spec) == [1.0, 2.0]


def test_a_module_says_what_its_code_does_not_show(write):
    spec = write(
        "COMPLETIONS = 'messages'\nKEY = 'con' + 'tent'\n"
        "def f(completions):\n    return [float(len(c[0][KEY])) for c in completions]\n"
    )
    assert values(spec) == [1.0, 2.0]
    spec = write("COMPLETIONS = 'text'\ndef f(completions):\n    return [float(c == 'content') for c in completions]\n")
    assert values(spec) == [0.0, 0.0]


def test_a_trl_function_may_leave_answers_out(write):
    spec = write("def f(completions, **kw):\n    return [None if c == '3' else 1.0 for c in completions]\n")
    assert values(spec) == [0.0, 1.0]


def test_an_async_function_is_waited_for(write):
    spec = write(
        "import asyncio\nasync def f(items, weight):\n"
        "    await asyncio.sleep(0)\n    return await asyncio.gather(*(one(i, weight) for i in items))\n"
        "async def one(item, weight):\n    return weight * len(item['response'])\n"
    )
    assert values(spec, {"weight": 2}) == [2.0, 4.0]
    spec = write("REWARD_TYPE = 'sequential'\nasync def f(item):\n    return len(item['response'])\n")
    assert values(spec) == [1.0, 2.0]
    with pytest.raises(RewardSpecError, match="does not accept"):
        load(spec, {"weight": 2})


def test_a_syntax_error_in_a_file_that_the_reward_imports_names_that_file(write, here, tmp_path):
    (tmp_path / "r1_broken_helper.py").write_text("x = 1\ndef g(:\n")
    with pytest.raises(RewardSpecError, match=r"file \S+/r1_broken_helper.py, which \S+/reward.py imports, line 2: "):
        here(write("import r1_broken_helper\ndef f(items): ...\n"))


TEXT = "return float(ground_truth == {0}) + 0.5 * ({0} == '55')"
TEXTS = "return [float(t == r) + 0.5 * (r == '55') for r, t in zip({0}, ground_truths)]"


@pytest.mark.parametrize(
    "source",
    [
        "def f(response, ground_truth): " + TEXT.format("response"),
        "REWARD_TYPE = 'sequential'\ndef f(response, ground_truth): " + TEXT.format("response"),
        "def f(ground_truth, response): " + TEXT.format("response"),
        "def f(*, response, ground_truth): " + TEXT.format("response"),
        "def f(response, ground_truth=None): " + TEXT.format("response"),
        "def f(response: str, gt=None, ground_truth: str = ''): " + TEXT.format("response"),
        "def f(response: 'str', answer=None):\n ground_truth = answer\n " + TEXT.format("response"),
        "def f(level, response, ground_truth): " + TEXT.format("response"),
        "async def f(response, ground_truth): " + TEXT.format("response"),
        "class C:\n async def __call__(self, response, ground_truth): " + TEXT.format("response") + "\nf = C()",
        "import functools\ndef g(response, ground_truth, x): " + TEXT.format("response") + "\n"
        "f = functools.partial(g, x=1)",
        "f = lambda response, ground_truth: float(ground_truth == response) + 0.5 * (response == '55')",
        "def f(predict: str, ground_truth: str, weight: float = 1.0): " + TEXT.format("predict"),
        "def f(responses, ground_truths): " + TEXTS.format("responses"),
        "def f(predicts: list[str], ground_truths: list[str]): " + TEXTS.format("predicts"),
        "from typing import List\ndef f(response: List[str], ground_truths): " + TEXTS.format("response"),
    ],
)
def test_a_function_of_texts_is_given_texts(write, here, source):
    assert here(write(source + "\n")) == [1.0, 0.5]


@pytest.mark.parametrize(
    "source",
    [
        "def f(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    assert (data_source, extra_info) in [('a', {'index': 1}), ('here', {})]\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': True, 'pred': solution_str}\n",
        "def f(solution_str, **kwargs):\n"
        "    assert kwargs['extra_info'] in ({'index': 1}, {}) and kwargs['data_source'] in ('a', 'here')\n"
        "    return float(solution_str == kwargs['ground_truth'])\n",
        "def f(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):\n"
        "    assert data_sources == ['a', 'here'] and extra_infos == [{'index': 1}, {}]\n"
        "    return [{'score': float(s == t)} for s, t in zip(solution_strs, ground_truths)]\n",
    ],
)
def test_a_function_of_verls_is_taken_as_it_is(write, source):
    given = [
        RewardInput("3", "3", metadata={"data_source": "a", "extra_info": {"index": 1}}),
        RewardInput("55", "5", source="here"),
    ]
    spec = write(source)
    assert values(spec, inputs=given) == [1.0, 0.0]
    with load(spec) as verifier:
        check_columns(verifier.reward.wants, ["x"])  # the columns may be missing


@pytest.mark.parametrize(
    "source",
    [
        "def f(response): return [float(r['response'] == '3') for r in response]",
        "def f(responses): return [g(r) for r in responses]\ndef g(r): return float(r.get('response') == '3')",
        "def f(predicts: 'list[dict[str, str]]', step=0): return [1.0 * (r['response'] == '3') for r in predicts]",
        "def f(x): return [float(len(r) == 5 and r['response'] == '3') for r in x]",
        "def f(x, level): return [float(r['response'] == '3') for r in x]",
        "def f(*args): return [float(r['response'] == '3') for r in args[0]]",
        "def f(x, /, weight=1): return [weight * float(r['response'] == '3') for r in x]",
    ],
)
def test_a_function_of_easyr1s_gets_mappings_whatever_its_parameter_is_called(write, here, source):
    assert here(write(source + "\n"), {"weight": 1} if "weight" in source else None) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(response): return float('3' in response)", r"f\(response\) does not tell whether 'response'"),
        ("def f(output, ground_truth): return 1.0", r"f\(output, ground_truth\) does not tell .*'reward_inputs'"),
        ("def f(output: str, reference: str): return 1.0", "does not tell whether 'output'"),
        ("def f(answer, ground_truth): return 1.0", "does not tell whether 'answer'"),
        ("def f(a, b, c): return {'response': 1.0}", "does not tell whether 'a'"),
        ("def f(response, gt_text=None): return 1.0", "does not tell whether 'response'"),
        (
            "REWARD_TYPE = 'batch'\ndef f(response, ground_truth): ...",
            "REWARD_TYPE is 'batch', but response is one text",
        ),
        ("REWARD_TYPE = 'sequential'\ndef f(solution_strs, ground_truths): ...", "'sequential', but .* is a list"),
        (
            "def f(response, ground_truth, /): ...",
            r"f\(response, ground_truth, /\) cannot be called with keywords only",
        ),
        ("def f(): ...", r"f\(\) cannot be called .* r1 calls f\(reward_inputs\)"),
        ("f = type", "write a function with `def`"),
    ],
)
def test_a_signature_that_fits_no_shape_or_two_is_refused_with_the_shapes(write, here, source, message):
    with pytest.raises(RewardSpecError, match=message):
        here(write(source + "\n"))
