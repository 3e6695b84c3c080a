"""Serves a trained character model over HTTP: the model in `final/` (model.py), its texts, several at once (batch.py),
the requests (request.py), and the server (server.py). The server uses torch, Starlette and uvicorn; `python
-m gpufleet.job.experiments.pretrain.serve` starts it.
"""
