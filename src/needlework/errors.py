"""The two kinds of failure a person can meet; both messages say how to fix it."""


class NeedleworkError(ValueError):
    """Bad input: something the caller can change. The command line prints it and exits with code 2."""


class TrialError(RuntimeError):
    """One trial failed while it ran (NaN logits, an intervention that did nothing); other trials go on."""
