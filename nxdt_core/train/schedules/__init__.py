"""Built-in learning-rate schedules: pure functions of the step, so that a resume needs no state and may move the
end."""
