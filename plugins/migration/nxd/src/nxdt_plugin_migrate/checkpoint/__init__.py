"""Checkpoints of NxD Training and NxD Core, read without NxD, torch-xla or a Neuron device.

Names, layouts and pickles were checked against files that NxD Core 0.18 itself wrote (its ``save_checkpoint``, its
converter for trn1, torch-xla 2.9's ZeRO-1 and xser, on a CPU, one process in the part of every rank). From its sources
alone, and not from files, are: the order of heads on trn2, padded vocabularies, the contents of ``user_content.pt``.
"""
