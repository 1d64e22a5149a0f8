"""Several processes at one job: who does which part, how they agree, how they learn that one is gone."""
