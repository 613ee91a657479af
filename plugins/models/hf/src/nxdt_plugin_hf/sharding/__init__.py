"""How a model of transformers is sharded: its forward pass traced, its plans translated, the result measured."""
