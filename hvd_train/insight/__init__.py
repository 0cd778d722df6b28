"""What measured times say: where the time goes, laws of scaling, predictions. It knows no framework."""
