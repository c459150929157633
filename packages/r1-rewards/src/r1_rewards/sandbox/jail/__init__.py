"""Code that runs inside the sandbox: supervisor, confinement, and the harnesses of judged programs.

These modules import nothing else of the package. A bare interpreter loads them as the package `jail`, without the
caller's environment.
"""
