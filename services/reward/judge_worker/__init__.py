"""The judge as a child process of the reward service: the one part of it that needs torch.

`python -m services.reward.judge_worker` serves the chat-completions shape that `graders/judge.py`
asks any endpoint in, on a socket that it inherits; `services.reward.judge_process` starts it, and
starts it again when it dies. Nothing of the service imports this package.

    requests --> server: a line --> batches --> model: tokens --> layer_stream: weights by layer
                                                  ^
                                      residency: how many layers stay on the device
"""
