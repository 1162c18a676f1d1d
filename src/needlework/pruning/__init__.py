"""From a ranking to a smaller model: heads leave the weights, or keep only the first tokens and the newest ones."""
