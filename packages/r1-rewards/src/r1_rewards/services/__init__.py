"""Rewards that ask elsewhere: a judge, a reward server, a classifier; and the server that answers such requests."""
