"""The fourth question with TensorFlow's own graphs: one in each process, linked by their variables.

What is computed is a graph of TensorFlow 1, in the calculation server and in each worker, with a
`tf.Session` of its own that knows nothing of a cluster. All else is `q4.py`.

    python examples/between_graph/q4_tensorflow.py --workers 2
"""

import os

from q4 import main

if __name__ == "__main__":
    # TensorFlow says much when it is imported.
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    main("tensorflow")
