"""The parts of `train_language_model.py`: text, windows, model, history, plot, and so on.

Little in here knows about ranks: the sampler, which takes two numbers, and what the ranks agree on
before they train. What is distributed is in the training script itself.
"""
