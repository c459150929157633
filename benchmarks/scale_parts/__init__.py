"""The parts of `scale.py`: what a run's driver, processes and files do as ranks and engines become more."""
