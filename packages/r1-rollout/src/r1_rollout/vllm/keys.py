"""What r1 calls things in vLLM's configuration and requests, for those who do not have vLLM, too."""

BANNED = "r1_banned_token_ids"  # in vLLM's additional_config: tokens that are never sampled
FORCED = "r1_forced_token_ids"  # in a request's extra_args: the response to say, so that its log-probs are reported
# The temperatures that vLLM takes, beside 0: it samples at COLDEST if asked for less, and refuses more than HOTTEST.
COLDEST, HOTTEST = 0.01, 2.0
