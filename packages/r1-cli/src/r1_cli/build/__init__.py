"""Build the objects of a run from its configuration: learner, engine, prompts, rewards, references."""
