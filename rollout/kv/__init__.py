"""KV memory: page numbers, the prefix tree and residency as integers; tensors and copies; the segment format."""
