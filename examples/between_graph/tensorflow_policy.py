"""A policy as a graph of TensorFlow 1, with a session of its own, trained by REINFORCE."""

import tensorflow.compat.v1 as tf

from paceline.adapters.tensorflow import GraphVariables


class Policy:
    """A graph and its session; `parameters` are the variables that the network is made of."""

    def __init__(self, seed):
        with tf.Graph().as_default():
            tf.set_random_seed(seed)
            self._obs = tf.placeholder(tf.float32, [None, 4])
            self._action = tf.placeholder(tf.int32, [None])
            self._gain = tf.placeholder(tf.float32, [None])
            logits = dense("out", tf.tanh(dense("hidden", self._obs, 32)), 2)
            self._sample = tf.random.categorical(logits, 1)
            unlikely = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=self._action, logits=logits
            )
            loss = tf.reduce_mean(unlikely * self._gain)
            self._train = tf.train.AdamOptimizer(1e-2).minimize(loss)
            self._session = tf.Session()
            self._session.run(tf.global_variables_initializer())
            self.parameters = GraphVariables(self._session, tf.trainable_variables())

    def choose(self, obs):
        """An action, drawn as the network says."""
        return self._session.run(self._sample, {self._obs: obs[None]})[0, 0]

    def train_step(self, data):
        """Raise the probability of actions that more reward than usual came after.

        The leaves of `data` are arrays `[items, STEPS, ...]`.
        """
        to_go = data["to_go"].ravel()
        fed = {
            self._obs: data["obs"].reshape(-1, 4),
            self._action: data["action"].ravel(),
            self._gain: (to_go - to_go.mean()) / (to_go.std() + 1e-8),
        }
        self._session.run(self._train, fed)


def dense(name, inputs, size):
    """A layer with variables of its own."""
    with tf.variable_scope(name):
        kernel = tf.get_variable("kernel", [inputs.shape[1], size])
        bias = tf.get_variable("bias", [size], initializer=tf.zeros_initializer())
        return inputs @ kernel + bias
