"""Training of the zoo's models: recipes, training documents, the training loop, studies and model cards."""
