"""One decoder for the Llama and Qwen2 families: what a model directory says, its weights, and running it."""
