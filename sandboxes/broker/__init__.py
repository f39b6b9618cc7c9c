"""The program that runs inside a sandbox and serves the host: a persistent shell, a persistent interpreter, files.

Standard library only, any Python from 3.9 on, and imported by nothing on the host but `framing`. It avoids modules that are
slow to import (asyncio, subprocess, dataclasses, typing): its start-up time is the sandbox's start-up time.
"""
