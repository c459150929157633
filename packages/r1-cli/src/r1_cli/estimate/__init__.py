"""What a run would take of devices that need not be here: memory by phase, time by phase, and what makes it fit."""
