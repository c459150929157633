"""What runs inside the sandbox of the code verifier: confinement, supervisor, and what the judged program is run by.

These modules import nothing of the rest of the package: they are loaded, as the package `jail`, by a bare interpreter
that knows neither the caller's environment nor the tests.
"""
