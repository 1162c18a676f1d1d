"""Making the zoo's models: recipes, documents, the training loop, and the card that says what came of it."""
