"""Serves a trained character model over HTTP: what `final/` holds (model.py), what may be asked (request.py), and the
server (server.py). Torch, Starlette and uvicorn; started by `python -m gpufleet.job.experiments.pretrain.serve`.
"""
