"""The parts of `train_language_model.py`: text, windows, model, checkpoint, history, plot.

Nothing in here knows about ranks but the sampler, which takes two numbers. What is distributed is
in the training script itself.
"""
