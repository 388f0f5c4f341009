"""What people repeat about training memory, answered by measurement: one row a statement, its conditions and a verdict.

    python benchmarks/claims.py                            on a GPU, the long form
    python benchmarks/claims.py --short                    on a GPU, in minutes (benchmarks/gpu/claims.sh)
    python benchmarks/claims.py --device cpu --tiny        the same table on small models, anywhere
    python benchmarks/claims.py --claims precision,cards   some of the claims

writes benchmarks/claims_<device>_<date>.md, .csv and .png. Every run goes through the project's own MLflow parent and
child runs, and every figure is read back from them. Interrupted, the same command goes on where it stopped. The claims
are in benchmarks/folklore/, one file a technique.
"""

import sys

if __name__ == "__main__":
    from folklore.command import main  # here alone: each run's process reads this file, and needs none of it

    sys.exit(main(sys.argv[1:]))
