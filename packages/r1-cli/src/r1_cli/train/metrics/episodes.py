"""Metrics of a step's episodes: turns, calls, why they stopped, and what each tool cost."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from r1_cli.train.groups.trajectory import Call, Trajectory


def episode_metrics(episodes: Sequence[Trajectory]) -> dict[str, float]:
    """Return `episode/…`, `tool/NAME/…` and `timing_s/tool/NAME/…`; shares and means are of episodes."""
    if not episodes:
        return {}
    turns = [len(episode.assistant_turns) for episode in episodes]
    calls = [call for episode in episodes for call in episode.calls]
    lengths = sum(len(episode.token_ids) for episode in episodes)
    stops = Counter(episode.stop_reason for episode in episodes)
    return {
        "episode/turns/mean": fmean(turns),
        "episode/turns/max": float(max(turns)),
        "episode/calls": len(calls) / len(episodes),
        "episode/pictures": fmean(len(episode.images) for episode in episodes),
        "episode/sampled_share": sum(episode.sampled_length for episode in episodes) / max(lengths, 1),
        **{f"episode/stop/{reason}": count / len(episodes) for reason, count in sorted(stops.items())},
        **_tool_metrics(calls),
    }


def _tool_metrics(calls: Sequence[Call]) -> dict[str, float]:
    by_tool: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        by_tool[call.tool].append(call)
    found: dict[str, float] = {}
    for tool, made in sorted(by_tool.items()):
        found |= {
            f"tool/{tool}/calls": float(len(made)),
            f"tool/{tool}/failures": float(sum(bool(call.error) for call in made)),
            f"timing_s/tool/{tool}/mean": fmean(call.seconds for call in made),
            f"timing_s/tool/{tool}/max": max(call.seconds for call in made),
            f"tool/{tool}/truncated": float(sum(call.truncated > 0 for call in made)),
        }
    return found
