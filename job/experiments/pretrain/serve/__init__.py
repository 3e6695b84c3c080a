"""Serves a trained character model over HTTP: what `final/` holds (model.py), what may be asked (request.py), and the
server (server.py). Standard library and torch only; started by `python -m job.experiments.pretrain.serve`.
"""
