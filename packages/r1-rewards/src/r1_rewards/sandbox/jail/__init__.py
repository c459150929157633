"""What runs inside the sandbox of the code verifier: the walls, the warden, and the harness of the judged program.

These modules import nothing of the rest of the package: they are loaded, as the package `jail`, by a bare interpreter
that knows neither the caller's environment nor the tests.
"""
