"""Weights on their way from a trainer to decode workers: manifests, buckets, directories, broadcasts; no Ray."""
