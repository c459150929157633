"""What the commands run: training, evaluation, merging, replay."""
