"""``nxdt data preprocess``: texts become ``.bin/.idx``.

One process reads blocks of whole records (``blocks``), others tokenise them (``records``), and the first appends what
comes back, in the order of the input (``run``). What is written up to a block is made safe every few seconds
(``progress``), so that a killed run resumes after it; the files are the same to the byte as without.
"""
