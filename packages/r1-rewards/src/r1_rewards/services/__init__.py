"""Rewards over HTTP and by reward models: a judge, a reward server, a classifier; and a server for any verifier."""
