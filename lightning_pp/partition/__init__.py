"""How an unchanged model is read and cut: trace a step, cost its layers, balance them, plan the stages."""
