"""Real clients and agent frameworks against the gateway. They come from the package index, into an environment of their
own: see `.ci/run`."""

import base64
import json
from concurrent.futures import Future
from importlib.util import find_spec

import pytest

pytest.importorskip("uvicorn", reason="r1-cli[gateway] is not installed")

from episode_toys import png

from r1_cli.gateway.messages import ChatCall, ChatReply
from r1_cli.gateway.server import GatewayServer

pytestmark = pytest.mark.slow


def needs(*packages):
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: see .ci/run")


PNG = png((9, 99, 9))
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}


class Policy:
    """Adds 2 and 3, and 4 and 5, with the tool `add` if there is one, and says what it saw."""

    def __init__(self):
        self.asked = []

    def __call__(self, session, request):
        self.asked.append(request)
        results = [message for message in request.messages if message["role"] == "tool"]
        parts = [part for message in request.messages for part in message["content"] if isinstance(part, dict)]
        pictures = [part["image"] for part in parts if part["type"] == "image"]
        calls = ()
        if request.tools and not results:
            calls = tuple(ChatCall(f"call_{a}", "add", json.dumps({"a": a, "b": a + 1})) for a in (2, 4))
        text = "I add." if calls else f"sums {[one['content'] for one in results]}, pictures {pictures == [PNG]}"
        future = Future()
        reason = "tool_calls" if calls else "stop"
        future.set_result(ChatReply(str(len(self.asked)), text, calls, reason, 9, 2, (5, 6), (-0.5, -1.0)))
        return future


@pytest.fixture
def policy():
    return Policy()


@pytest.fixture
def address(policy):
    server = GatewayServer(policy)
    yield server.open("a")
    server.close()


class TestOpenai:
    pytestmark = needs("openai")

    @pytest.fixture
    def client(self, address):
        import openai

        with openai.OpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
            yield client

    def test_chat_completions_with_tools_and_a_picture(self, client, policy):
        content = [{"type": "text", "text": "Add."}, {"type": "image_url", "image_url": {"url": URL}}]
        messages = [{"role": "user", "content": content}]
        tools = [{"type": "function", "function": ADD}]
        first = client.chat.completions.create(model="m", messages=messages, tools=tools, logprobs=True)
        choice = first.choices[0]
        assert (choice.finish_reason, len(choice.message.tool_calls), first.usage.total_tokens) == ("tool_calls", 2, 11)
        assert [token.logprob for token in choice.logprobs.content] == [-0.5, -1.0]
        messages.append(choice.message)
        for call in choice.message.tool_calls:
            total = sum(json.loads(call.function.arguments).values())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        second = client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert second.choices[0].message.content == "sums ['5', '9'], pictures True"
        assert policy.asked[1].messages[:1] == policy.asked[0].messages
        assert [call["arguments"] for call in policy.asked[1].messages[1]["tool_calls"]] == [
            {"a": 2, "b": 3}, {"a": 4, "b": 5},
        ]  # fmt: skip

    def test_a_stream_of_chat_completions(self, client):
        tools = [{"type": "function", "function": ADD}]
        asked = {"model": "m", "messages": [{"role": "user", "content": "Add."}], "tools": tools}
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            whole = stream.get_final_completion()
        assert [call.function.arguments for call in whole.choices[0].message.tool_calls] == [
            '{"a": 2, "b": 3}', '{"a": 4, "b": 5}',
        ]  # fmt: skip
        assert (whole.choices[0].message.content, whole.usage.total_tokens) == ("I add.", 11)

    def test_responses_with_tools_and_a_picture(self, client, policy):
        content = [{"type": "input_text", "text": "Add."}, {"type": "input_image", "image_url": URL, "detail": "auto"}]
        items = [{"role": "user", "content": content}]
        tools = [{"type": "function", **ADD, "strict": False}]
        first = client.responses.create(model="m", input=items, tools=tools, instructions="Be brief.")
        calls = [item for item in first.output if item.type == "function_call"]
        assert (first.output_text, first.status, len(calls)) == ("I add.", "completed", 2)
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "7"} for call in calls]
        whole = client.responses.create(
            model="m", input=[*items, *first.output, *results], tools=tools, instructions="Be brief."
        )
        assert whole.output_text == "sums ['7', '7'], pictures True"
        from_earlier = client.responses.create(
            model="m", input=results, tools=tools, previous_response_id=first.id, instructions="Be brief."
        )
        assert from_earlier.output_text == whole.output_text
        assert policy.asked[1] == policy.asked[2]

    def test_a_stream_of_responses(self, client):
        tools = [{"type": "function", **ADD, "strict": False}]
        with client.responses.stream(model="m", input="Add.", tools=tools) as stream:
            kinds = [event.type for event in stream]
            whole = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
        assert whole.output[1].arguments == '{"a": 2, "b": 3}'
        with client.responses.stream(model="m", input="Hello") as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == "sums [], pictures False"

    def test_errors_are_of_the_clients_classes(self, client, address):
        import openai

        ask = client.chat.completions.create
        messages = [{"role": "user", "content": "x"}]
        with pytest.raises(openai.BadRequestError, match="n must be 1") as caught:
            ask(model="m", messages=messages, n=2)
        assert caught.value.param == "n"
        with pytest.raises(openai.AuthenticationError, match="not this session's"):
            client.with_options(api_key="no").responses.create(model="m", input="x")
        with pytest.raises(openai.NotFoundError, match="there is no session 'b'"):
            client.with_options(base_url=address.base_url.replace("/a/", "/b/")).models.list()
        assert [model.id for model in client.models.list()] == ["policy"]


class TestAnthropic:
    pytestmark = needs("anthropic")

    @pytest.fixture
    def client(self, address):
        import anthropic

        with anthropic.Anthropic(base_url=address.root_url, api_key=address.api_key, max_retries=0) as client:
            yield client

    @pytest.mark.parametrize("stream", [False, True])
    def test_messages_with_tools_and_a_picture(self, client, policy, stream):
        source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
        content = [{"type": "text", "text": "Add."}, {"type": "image", "source": source}]
        messages = [{"role": "user", "content": content}]
        tools = [{"name": "add", "description": "Add two numbers.", "input_schema": NUMBERS}]

        def ask():
            asked = {"model": "m", "max_tokens": 9, "messages": messages, "tools": tools, "system": "Be brief."}
            if not stream:
                return client.messages.create(**asked)
            with client.messages.stream(**asked) as events:
                return events.get_final_message()

        first = ask()
        assert (first.stop_reason, first.usage.input_tokens, first.usage.output_tokens) == ("tool_use", 9, 2)
        calls = [block for block in first.content if block.type == "tool_use"]
        assert [call.input for call in calls] == [{"a": 2, "b": 3}, {"a": 4, "b": 5}]
        messages.append({"role": "assistant", "content": first.content})
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "7"} for call in calls]
        messages.append({"role": "user", "content": results})
        second = ask()
        assert second.content[0].text == "sums ['7', '7'], pictures True"
        assert [message["role"] for message in policy.asked[1].messages] == [
            "system", "user", "assistant", "tool", "tool",
        ]  # fmt: skip

    def test_errors_are_of_the_clients_classes_and_a_bearer_token_is_taken(self, client, address):
        import anthropic

        messages = [{"role": "user", "content": "x"}]
        asked = {"model": "m", "max_tokens": 9, "messages": messages}
        with pytest.raises(anthropic.AuthenticationError, match="not this session's"):
            client.with_options(api_key="no").messages.create(**asked)
        with pytest.raises(anthropic.BadRequestError, match="tool_choice must be"):
            client.messages.create(**asked, tool_choice={"type": "any"})
        bearer = anthropic.Anthropic(base_url=address.root_url, auth_token=address.api_key, max_retries=0)
        assert bearer.messages.create(**asked).stop_reason == "end_turn"


@needs("agents")
@pytest.mark.parametrize("protocol", ["chat_completions", "responses"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents_calls_its_tools(address, protocol, stream):
    import asyncio

    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0)
    kinds = {"chat_completions": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    agent = agents.Agent("adder", instructions="Add.", tools=[add], model=kinds[protocol]("m", client))

    async def solve():
        if not stream:
            return (await agents.Runner.run(agent, "Go.")).final_output
        running = agents.Runner.run_streamed(agent, "Go.")
        async for _ in running.stream_events():
            pass
        return running.final_output

    assert asyncio.run(solve()) == "sums ['5', '9'], pictures False"


@needs("pydantic_ai", "openai", "anthropic")
@pytest.mark.parametrize("protocol", ["chat_completions", "responses", "messages"])
def test_pydantic_ai_calls_its_tools(address, protocol):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if protocol == "messages":
        provider = AnthropicProvider(base_url=address.root_url, api_key=address.api_key)
        model = AnthropicModel("m", provider=provider)
    else:
        kind = {"chat_completions": OpenAIChatModel, "responses": OpenAIResponsesModel}[protocol]
        model = kind("m", provider=OpenAIProvider(base_url=address.base_url, api_key=address.api_key))
    agent = Agent(model, instructions="Add.")

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    assert agent.run_sync("Go.").output == "sums ['5', '9'], pictures False"


@needs("smolagents", "openai")
def test_smolagents_calls_its_tools_and_replays_its_turns(address, policy):
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        return a + b

    # smolagents forces a call in each turn unless its model says otherwise.
    model = OpenAIModel("m", api_base=address.base_url, api_key=address.api_key, tool_choice="auto")
    agent = ToolCallingAgent([add], model, max_steps=2, verbosity_level=0)
    agent.run("Add 2 and 3.")
    assert policy.asked[0].messages == policy.asked[1].messages[: len(policy.asked[0].messages)]
    assert "5" in json.dumps(policy.asked[1].messages[-1]["content"])
