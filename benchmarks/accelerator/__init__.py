"""What ``benchmarks/accelerator_day.py`` measures on an accelerator.

The driver (``stages``, ``results``, ``driver``, ``bundle``) needs only the standard library: it installs nxdt where it
is missing and starts every stage in a separate process (``child``). ``measurements`` has the stages, one module per
group.
"""
