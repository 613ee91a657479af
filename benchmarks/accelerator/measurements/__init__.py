"""What the stages of ``accelerator.stages`` measure, one module a group."""
