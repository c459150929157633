"""The tokens of an episode while it is played: each turn's are held once, and shared by the episodes that go on."""

import hashlib

import numpy as np
import torch

from r1_cli.train.episodes.episode import Episode, EpisodeLimits
from r1_data.turns.continuation import Continuation
from r1_data.types import Prompt
from r1_rollout.types import Completion

SAID = {"role": "assistant", "content": "x"}
# M-RoPE: the first axis counts tokens, the others stand still in a picture of two tokens.
PROMPT = Prompt(
    "row:0", "?", [5, 6, 6, 7], [5, 6, 7], torch.tensor([[0, 1, 2, 3], [0, 1, 1, 2], [0, 1, 2, 3], [0, 1, 1, 2]]), ""
)


def completion(*tokens: int) -> Completion:
    return Completion(tokens, [-0.1 * token for token in tokens], "stop", 3)


def picture(*tokens: int) -> Continuation:
    """Text before and behind a picture of two tokens, of which the engine sees one."""
    length = len(tokens)
    rotary = torch.arange(length).clamp(max=length - 2)
    positions = torch.stack([torch.arange(length), rotary, rotary, rotary])
    return Continuation([*tokens], [*tokens[:-1]], positions, {"pixel_values": torch.ones(1, 2)}, text="seen")


def test_a_context_is_the_prompt_and_all_turns_behind_it() -> None:
    episode = Episode(PROMPT, 0, EpisodeLimits(100, 10))
    assert episode.context is PROMPT
    episode.add_turn(completion(8, 9), SAID)
    assert episode.add_observation(picture(1, 2, 3), [], [])
    episode.add_turn(completion(4), SAID)
    context = episode.next_prompt()
    assert context.id == "row:0/0/2"
    assert context.token_ids == [5, 6, 6, 7, 8, 9, 1, 2, 3, 4]
    assert context.engine_token_ids == [5, 6, 7, 8, 9, 1, 2, 4]
    assert context.position_ids[0].tolist() == [*range(10)]
    # Each piece goes on behind the largest position of any rotary axis.
    assert context.position_ids[1].tolist() == [0, 1, 1, 2, 4, 5, 6, 7, 7, 8]
    assert context.position_ids[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8]
    assert context.model_inputs["pixel_values"].shape == (1, 2)
    assert PROMPT.token_ids == [5, 6, 6, 7]
    for turn, seen in ((0, [5, 6, 6, 7]), (2, [5, 6, 6, 7, 8, 9, 1, 2, 3])):
        digest = hashlib.blake2b(np.asarray(seen, np.int32).tobytes(), digest_size=8).digest()
        assert episode.path.turns[turn].state == int.from_bytes(digest, "big", signed=True)


def test_episodes_that_go_on_from_one_each_hold_their_own_turns() -> None:
    first = Episode(PROMPT, 0, EpisodeLimits(100, 10))
    first.add_turn(completion(8), SAID)
    others = [first.copy(), first.copy()]
    for token, other in enumerate(others, 1):
        other.add_turn(completion(token), SAID)
    assert [episode.context.token_ids[4:] for episode in (first, *others)] == [[8], [8, 1], [8, 2]]
    assert [len(episode.path.turns) for episode in (first, *others)] == [1, 2, 2]
    assert [episode.length for episode in (first, *others)] == [1, 2, 2]
    assert others[0].path.turns[1].state == others[1].path.turns[1].state  # both saw the same
    for other in others:
        other.add_turn(completion(3), SAID)
    assert others[0].path.turns[2].state != others[1].path.turns[2].state
    context = others[0].path.copy()
    context.as_context(2)
    trained = [path.trajectory("done", "", prompt=None) for path in (context, others[0].path)]
    assert [one.sampled.tolist() for one in trained] == [[False, False, True], [True] * 3]
    assert [one.logprobs.tolist() == [0.0, 0.0, np.float32(-0.3)] for one in trained] == [True, False]


def test_a_long_episodes_turns_hold_each_token_once() -> None:
    """The copies that an agent's turns keep share the tokens before them."""
    episode, kept = Episode(PROMPT, 0, EpisodeLimits(10**6, 10**6)), []
    for _ in range(40):
        episode = episode.copy()
        episode.add_turn(completion(*range(50)), SAID)
        kept.append(episode)
    held = {id(piece.token_ids): len(piece.token_ids) for one in kept for piece in one.path._pieces}
    assert sum(held.values()) == 40 * 50
    assert all(one.path._context is None for one in kept)
