"""The seed of a sample: the same in the engine of this process and on every server, whoever is asked again."""

from r1_rollout.sampling import noise_key

SEED_BITS = 62  # what fits signed and unsigned words everywhere, with room for the samples of a group


def sample_seed(seed: int, prompt_id: str, sample: int) -> int:
    """Return the seed in [0, 2^62 + sample] of one sample, a function of (seed, prompt id, sample index).

    A server takes one seed a request and gives sample i of its group that seed + i, so that is the rule everywhere.
    vLLM's generators mix the seed's bits, so neighbours are as independent as any two.
    """
    return (noise_key(seed, prompt_id, 0) & ((1 << SEED_BITS) - 1)) + sample
