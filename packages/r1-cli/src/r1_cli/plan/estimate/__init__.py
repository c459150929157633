"""`r1 estimate`: memory and time of a configuration on given hardware."""
