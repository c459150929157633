"""Groups of responses: shaping of rewards, filtering, advantages."""
