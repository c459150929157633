"""Prompts over N stand-in engines: messages, balance, and the driver's seconds."""

import time
from statistics import fmean

from r1_rollout.types import SamplingParams
from scale_parts.counted import Traffic
from scale_parts.engines import open_pool, prompts_of

GROUPS, ANSWERS, TOKENS = 24, 8, 512  # of each engine
MEAN = 3.0  # seconds of a group
SESSION = 5.0  # seconds of polling


def measure(count: int) -> dict[str, float]:
    traffic = Traffic()
    pool = open_pool(count, traffic, TOKENS)
    engines = [member.ranks.engine for member in pool._engines.engines]  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=TOKENS, n=ANSWERS)
    with pool.active():
        traffic.messages.clear()
        begun, wall = time.process_time(), time.monotonic()
        found = sum(1 for _ in pool.generate(prompts_of(GROUPS * count, MEAN), params))
        seconds, wall = time.process_time() - begun, time.monotonic() - wall
        assert found == GROUPS * count
        work = [engine.seconds for engine in engines]
        record = {
            "gen messages": traffic.messages.total(),
            "gen processor s": seconds,
            "gen busiest engine / mean": max(work) / fmean(work),
            "gen s / ideal": wall / (sum(work) * ANSWERS / 64 / count),
        }
        return record | poll(pool, traffic, count)


def poll(pool, traffic: Traffic, count: int) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Hold a session open with a request at each engine that ends with the session."""
    session = pool.open_session(SamplingParams(max_tokens=TOKENS, n=1))
    for number, prompt in enumerate(prompts_of(8 * count, SESSION)):
        session.submit(str(number), prompt, max_tokens=TOKENS)
    traffic.messages.clear()
    begun, wall = time.process_time(), time.monotonic()
    while session.poll(1.0) and time.monotonic() - wall < SESSION / 2:
        pass
    time.sleep(max(0.0, SESSION / 2 - time.monotonic() + wall))
    seconds, wall = time.process_time() - begun, time.monotonic() - wall
    polls = traffic.messages["work"]
    session.close()
    return {"session polls / s": polls / wall, "session processor s / s": seconds / wall}
