"""What several tests share: small studies, users' modules, servers, recorded tables."""
