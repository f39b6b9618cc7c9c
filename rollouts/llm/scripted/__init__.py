"""A scripted LLM backend for demos, CI and users' environment tests: vLLM's HTTP API without a model.

async with ScriptedServer(script=solve) as server: ...         # in a test
python -m rollouts.llm.scripted --port 0 --script solver       # as a process; prints one JSON line once it listens
"""
