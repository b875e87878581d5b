"""The launcher: torchrun's flags and semantics, with the first failure last on the screen and no rank left behind."""
