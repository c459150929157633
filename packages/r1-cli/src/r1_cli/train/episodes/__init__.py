"""Episodes: multi-turn rollouts with tools and environments. A single-turn run imports none of this."""
