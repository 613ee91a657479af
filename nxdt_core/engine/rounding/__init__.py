"""Stochastic rounding of weights: of updates where there are no masters, else of the copies of masters.

Which way an element is rounded is a function of (seed, step, global parameter name, global element) alone: the same on
every replica and in every layout, and there is no state to save.
"""
